"""The command line: parse, call, print. Nothing else in Lydite prints."""
