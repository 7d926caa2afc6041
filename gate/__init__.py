"""What the user gives, read and checked before a model is loaded: the command line, functions of their own, data."""
