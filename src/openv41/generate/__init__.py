"""Ids after ids: choosing one from logits, continuing sequences, scoring what is there. It knows ids, not text."""
