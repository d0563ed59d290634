"""The steps of optimizers, whoever made them: hearing of them, and what happens inside of one."""
