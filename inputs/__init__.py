"""What the user gives, read and checked before a model is loaded: the command line, own functions, data."""
