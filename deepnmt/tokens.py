"""The token ids that every vocabulary reserves.

A source is pieces + eos, the decoder's input bos + pieces, its target pieces + eos.
"""

UNK, BOS, EOS, PAD = range(4)
