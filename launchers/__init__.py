"""What the set-up and training launchers do, the same for .sh and .bat; needs only the standard library."""
