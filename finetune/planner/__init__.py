"""Plan: recipe + card + data statistics -> every setting resolved, with reasons and a forecast."""
