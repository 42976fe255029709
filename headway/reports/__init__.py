"""What people see of a run: the progress line, the summary, the timeline and the page, all read from its trace."""
