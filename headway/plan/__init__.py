"""What a run needs before it is one: facts of hardware and models, memory, speed, and the laws of the schedule."""
