"""`python -m posttrainllm` is the console command."""

from posttrainllm.adapters.cli import main

main()
