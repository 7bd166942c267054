"""The ids that every vocabulary reserves. Source: pieces, eos; target in: bos, pieces; target out: pieces, eos."""

UNK, BOS, EOS, PAD = range(4)
