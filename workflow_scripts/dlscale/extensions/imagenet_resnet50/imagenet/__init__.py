"""`imagenet`: photographs and their classes, in folders of image files."""
