"""The commands of the command line: flags and help texts, and one call each."""
