"""`deepnmt report`: a page about the scores and translations of a run, or of two."""
