"""Training text that is modified as it is read (`data.modify`): case, typos, words to copy, noise, segmentation."""
