"""What sits below the arena: one contract (`base`), one module for each kind of tier."""
