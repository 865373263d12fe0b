"""The reward service: raw components, the preference of the moment, and a typed outcome for every trajectory."""
