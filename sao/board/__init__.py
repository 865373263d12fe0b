"""The run's notice board: small facts that services read of each other; base.py is the contract."""
