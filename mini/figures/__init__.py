"""The figures of the model card, one file each: a function that measures, one that writes the table.

    texts        which held-out documents, as ids and as bytes
    sizes        parameters and bytes by component
    training     data, tokens seen, time, device, the curve
    likelihood   bits per byte of the held-out bytes, by position and by length of context
    compressors  gzip, bz2, xz on the same bytes
    ngram        an interpolated Kneser-Ney model of the same training tokens
    indexers     how many of the best latents each indexer picks
    drafts       tokens a round of the model's own draft
    validity     how many sampled completions are Python

mini/card.py puts them together.
"""
