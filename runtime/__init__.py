"""Launch, signals, files, records, progress: what any program could have. Imports nothing of this one."""
