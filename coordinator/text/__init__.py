"""Text to token ids and back.

It owns the vocabulary of a model file, the cutting into words, and the text of an answer while its
tokens arrive. It knows no engine and no request. A large vocabulary costs about 100 MiB: one
process of a run loads it.
"""
