"""The files of a run: how they are written, read, named and locked."""
