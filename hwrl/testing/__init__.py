"""What backends, engines and their tests share; shipped, so that a package outside this repository can use it."""
