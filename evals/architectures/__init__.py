"""Every decoder module of mlx-lm, tiny and random, through our cache and through its own."""
