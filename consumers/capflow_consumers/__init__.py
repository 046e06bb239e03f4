"""The consumers and the controller that come with capflow, and the commands for the files that they write.

The plugin loader imports a module for each consumer. They use nothing that other people's consumers cannot use.
Invariant: no consumer imports another one.
"""
