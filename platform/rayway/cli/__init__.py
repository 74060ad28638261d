"""The command line: one file a command. Parse, call one function, print."""
