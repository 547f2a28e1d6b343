"""The front's HTTP: requests are judged (`ask`), sent to the lead (`lead`) and answered (`app`)."""
