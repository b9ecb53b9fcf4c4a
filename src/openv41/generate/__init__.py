"""Ids after ids: choosing one from logits, continuing sequences, with drafts or without; scoring. It knows no text."""
