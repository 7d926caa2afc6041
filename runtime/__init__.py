"""Launch, signals, files, progress: what any program could have. Imports nothing of this one."""
