"""What callers ask for, and who may start: plain data and rules."""
