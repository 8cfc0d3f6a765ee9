"""Stretto on Kubernetes: the same job model as an ElasticJob object, the same core in a controller.

`fields`, `schema` and `elastic_job` are the resource: what an ElasticJob may say, and its translation to and from the
job file. `pod_template` and `services` make the pods, and the objects of a service, out of one. `manifests` writes the
generated part of `deploy/kubernetes`. None of these does any I/O but the last.
"""
