"""`deepnmt check-cluster`: whether the machines of a run fit together, before it costs hours to find out."""
