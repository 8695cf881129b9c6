from bestiary.cli import main

main()
