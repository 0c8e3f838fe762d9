"""The only package that decides: slots, policies, processes, budget; tokenizer and command line."""
