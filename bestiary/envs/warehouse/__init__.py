"""The warehouse environment: a robot collects items that disappear at a certain age. Agents cannot observe the ages."""
