"""The warehouse environment: a robot collects items, which disappear at a certain age. It cannot observe the ages."""
