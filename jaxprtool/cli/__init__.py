"""One module per command: parse the options, call below, print."""
