"""What is learned of jobs while they run, and used for those to come. All of it pure: values in, values out.

`curve`: seconds per step as a function of workers, from what was observed of one job; optimistic where nothing was.
`history`: finished runs of a class; how long the next one will be, from what its user wrote down; the first curve.
`remaining`: work and time left, each with its uncertainty.
`siblings`: how long a job of unknown length will still run, judged by the jobs submitted around it.
"""
