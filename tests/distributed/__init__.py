"""What two to four trainer processes compute together."""
