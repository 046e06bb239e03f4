"""The consumers and the controller that come with capflow; they use nothing that other people's cannot."""
