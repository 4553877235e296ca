local pick = cheapest
