"""`corefed export`: a client's model in files that need no corefed to be used."""
