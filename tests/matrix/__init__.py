"""Every supported version of vLLM, each in an overlay of the project's environment, with the same tests."""
