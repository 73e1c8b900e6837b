"""The state that ranks offer: served over HTTP in blocks, pulled from several holders."""
