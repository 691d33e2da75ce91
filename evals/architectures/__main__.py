"""`python -m posttrainllm.evals.architectures`."""

from posttrainllm.evals.architectures.command import command
from posttrainllm.evals.entry import run_command

if __name__ == "__main__":
    run_command(command)
