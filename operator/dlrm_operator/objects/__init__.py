"""The objects of an attempt as plain data: Service, ConfigMaps, Secret, pods, and who starts them together."""
