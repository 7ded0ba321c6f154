"""The command line: parse, call, print. All printing of the package happens in this room."""
