"""Recording a run step by step, and running it again. What for and how: command.py; the file: trace.py."""
