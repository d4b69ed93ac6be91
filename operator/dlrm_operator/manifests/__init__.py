"""The objects of an attempt as plain data: Service, ConfigMaps, pods, and who starts them together."""
