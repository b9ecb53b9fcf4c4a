"""What a person hands in, made into ids and patches: text, conversations, pictures."""
