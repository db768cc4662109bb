"""The lab: recipes, data, training and comparison, on nothing but what a user of gnmr has."""
