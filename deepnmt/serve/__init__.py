"""Translation over HTTP: `deepnmt serve`. Needs the extra `serve`."""
