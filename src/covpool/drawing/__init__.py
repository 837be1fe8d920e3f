"""How figures look: colours, letters, and what they are saved as."""
