"""OCI registries: they keep the versions of a model as artefacts, in the media types of the CNCF's ModelPack.

oci://REGISTRY/REPOSITORY:N     version N of one model; each of its files is a layer, stored once by its digest
"""
