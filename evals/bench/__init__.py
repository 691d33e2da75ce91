"""Measuring decoding speed side by side: who takes part, the clock, the costs, the table and the plot."""
