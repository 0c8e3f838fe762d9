"""The decision core: an event goes in, actions come out (`state`).

It owns slots, residency of experts, policies, prefetch, and which sequences compute what next. It
is pure: it reads no clock, opens nothing, draws no random number, and knows neither processes nor
settings. Time, chance and answers are brought to it.
"""
